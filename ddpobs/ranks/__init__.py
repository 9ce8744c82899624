"""What the ranks share through the rendezvous store, without a collective."""
