"""The leader at work: ledger, cycle, orders, reports. `scheduling` decides, `lifecycle` transitions."""
