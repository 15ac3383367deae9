"""The advisor: which TP, PP and replicas for this model, machine and load.

Reads model facts, a device and a topology, searches every configuration that fits with the cost model of
`dynamictp.cost`, and says what it recommends and why. No torch, no network. The command is `dynamictp plan`.
"""
