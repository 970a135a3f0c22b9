"""What attacks share, readable from an attack downwards: a file imports from those below it.

Matching: `deep_leakage` (of `dlg` and `idlg`; `inverting_gradients` builds alike) plays waves of
starts (`restarts`) of candidates whose labels may be read first (`labels`). The objective
(`matching`) adds terms; `encoding` makes images of an optimiser's vectors. `evidence` weighs what
was seen into terms (`terms`); `together` fits all victims at once to what is known of them
together. Each term compares what candidate clients (`clients`,
`gradients`) would have sent with what was. Optimisers: `adam`, `lbfgs` with
`line_search` and `curvature`.

Learned: `inverter` (of `ridge` and `decoder`) regresses (`regression`, `local`, `grid`) images on
what public samples look like through the defense (`channel`).

Counts of labels: `restored` (of `ilrg`), `weighed` (by `regression`) and `counts`; `wire_labels`.

Below all of them: `private` estimates what clients never upload, `prior` is what public data says
of a sample, `observation` stacks what was seen, and `chunks` fits work to the memory.
"""
