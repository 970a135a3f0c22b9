"""What attacks share, readable from an attack downwards: a file imports from those below it.

Matching: `deep_leakage` (of `dlg` and `idlg`; `inverting_gradients` builds alike) plays waves of
starts (`restarts`) of candidates whose labels may be read first (`labels`). The objective
(`matching`) adds terms, and compares the answers of all attacks; `encoding` makes images of an
optimiser's vectors. `evidence` weighs what was seen into terms (`terms`); `joint` fits images
together with what clients kept to themselves, and all victims at once to what is known of them
together; `posterior` replaces the likeliest images by what is most like draws from their
posterior. Each term compares what candidate clients (`clients`) would have sent with what was.

Learned: `inverter` (of `ridge` and `decoder`) regresses (`regression`) images on what public
samples look like through the defense (`channel`).

Counts of labels: `restored` (of `ilrg`), `weighed` (by `regression`) and `counts`.

In closed form: `position_table` and `one_hot` (of `analytic`) solve patches and records of tables.

Below all of them: `private` estimates what clients never upload, `orders` which samples a step
used, `observation` parses what was seen, and `optimisers` minimise, in pieces that fit the memory.
"""
