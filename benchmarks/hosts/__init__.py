"""Several hosts on one machine: systems of distributed training compared over links of a stated rate."""
