"""plait bench ops: single operations of graph networks, checked against float64, then timed side by side."""
