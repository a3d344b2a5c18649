# SPDX-License-Identifier: Apache-2.0
"""`pytransformer bench`: check and time every op on every working backend.

command.py reads the command line, plan.py selects the problems, and runner.py checks, times and
measures the memory of one problem. results.py defines the file format; report.py and plots.py
produce the output. pytransformer.cli.providers has the implementations that compute an op.
"""
