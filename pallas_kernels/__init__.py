"""GPU kernels in Pallas, one folder per operation: plain arrays in, plain arrays out.

In every public call `layer` is int or int32[], the index on the first axis of arrays that are given
whole; an array lets all layers share a trace. `implementation` is one of `OPERATION.names`; None
takes the first that does not refuse. `interpret` runs its kernel on a CPU, for tests. ValueError
names operands that do not fit, or the reasons why an implementation that is asked for refuses.
"""
