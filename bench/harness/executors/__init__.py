"""How a plan's jobs are carried out: in this process or by worker processes.

Every executor takes a queue of tasks, to which the caller may add while outcomes come in, and
gives one outcome per task. It writes no record: whoever called it does.
"""
