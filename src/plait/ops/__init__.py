"""The operations: what each reads and makes, its exact work and its gradient, declared once."""

# imported for the rows they enter into the table
from plait.ops import chain as chain
from plait.ops import exchange as exchange
from plait.ops import linear as linear
