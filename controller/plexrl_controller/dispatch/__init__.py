"""The leader at work: ledger, cycle, orders, reports. Decisions come from `scheduling`, transitions from `lifecycle`."""
