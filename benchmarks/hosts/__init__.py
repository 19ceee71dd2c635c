"""Several hosts on one machine: arms of distributed training compared over links of a stated rate."""
