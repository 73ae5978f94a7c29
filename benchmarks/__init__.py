"""Measure the three generations and their peers: `python -m benchmarks --help` lists the commands.

Read in this order: `problems` (what is measured), `contenders` and `peers` (who is measured), `correctness` (who may be
timed), `timing` (how), `rows` (what is kept), `compare` (the sweep), `ablate` (the same, over the switches of one
generation), `report` (tables and plots from rows alone).
"""
