"""Every private name of torch's that ddpobs relies on; `tests/torch_seam/test_contract.py` holds each."""
