"""Every private name of torch that ddpobs relies on; `tests/torch_seam/test_contract.py` checks each."""
