"""How a suite becomes records: plan, train, attack, runner, executors, store, merge, costs."""
