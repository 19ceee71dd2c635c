"""How long, and why: flops and bytes of a step, the machine's rates, seconds."""
