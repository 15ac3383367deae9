"""What to send: length distributions, arrivals, mixes, traces, and text of an exact token count.

A `Workload` is a value; `plan.make_plan` turns it and its seed into planned requests (times, lengths,
tenants), `text.TextMaker` turns those into a schedule of real text. Nothing here talks to a server but
the token counter.
"""
