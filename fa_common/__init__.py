"""What no generation changed: the contract and its checks, masks, reference, tiles, compile cache, torch operators."""
