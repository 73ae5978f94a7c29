"""Measure the three generations and their peers: `python -m benchmarks --help` lists the commands.

Read in this order: `problems` (what is measured), `contenders` and `peers` (who is measured), `correctness` (who may be
timed), `timing` (how), `rows` (what is kept), `compare` (the sweep); then what else is swept: `ablate` (the switches of
one generation), `shapes` (beyond the square grid), `sustained` (one problem for seconds), `decode` (one query against a
cache); at last `report` (tables and plots from rows alone).
"""
