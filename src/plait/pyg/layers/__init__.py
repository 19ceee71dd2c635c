"""The lowering rules, by the kind of matrix the layers are built on."""
