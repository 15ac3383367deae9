"""The cost model: what a model, a device and a degree cost in memory and time. Pure.

No I/O, no clock, no torch: the advisor, the planner and the simulator call the same functions. Inputs are
values (`ModelShape`, `DeviceFacts`, `Assumptions`, `Calibration`); every uncertain number is a `Figure`
that carries its range and where it came from, and a prediction is evaluated at all four corners of them.
"""
