"""What trainings and attack cells cost in seconds, bytes and memory, told from finished ones.

`records` measures result folders; `shipped.json` holds what was measured elsewhere. A
`lookup.Table` tells of a job that was not measured what the nearest one took that was.
"""
