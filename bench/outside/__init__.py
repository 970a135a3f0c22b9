"""Outside attacks: what the server saw of one cell as plain files and as an `nn.Module`, and scores
of what somebody's own program rebuilt from them."""
