"""The table of operations: what each reads and makes, its exact work and its gradient, declared once."""

# imported because they add their rows to the table
from plait.ops import aggregators as aggregators
from plait.ops import attention as attention
from plait.ops import chain as chain
from plait.ops import entries as entries
from plait.ops import exchange as exchange
from plait.ops import gates as gates
from plait.ops import linear as linear
from plait.ops import messages as messages
from plait.ops import pieces as pieces
from plait.ops import relations as relations
from plait.ops import rows as rows
from plait.ops import sequence as sequence
