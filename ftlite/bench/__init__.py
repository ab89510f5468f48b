# SPDX-License-Identifier: BSD-3-Clause
"""Measuring: ``python -m <package> bench ...``. Needs nothing but torch, and reports nothing that it did not verify.

Rules of this folder: what the command line's process imports needs no torch, so that a wrong option is told at
once; the work is done in children, each with a memory and an interpreter of its own; a figure is printed only for
a run whose bytes were compared.
"""
