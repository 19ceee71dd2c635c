"""Times the kernels of a GPU against what torch would run there, each checked before the clock starts.

python -m plait.bench.gpu --output gpu.json            everything, a table on the screen
python -m plait.bench.gpu --only attention --sweep     all tile sizes, to choose the defaults from
"""
