# SPDX-License-Identifier: Apache-2.0
"""`pytransformer bench`: every op, on every backend that works here, checked and then timed beside other
code.

command.py reads the command line; plan.py says which problems; runner.py takes one problem through check,
clock and memory; results.py is the file format; report.py and plots.py are what people read. Who computes an
op, and how, is in pytransformer.cli.providers.
"""
