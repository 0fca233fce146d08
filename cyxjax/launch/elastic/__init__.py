"""Hosts that come and go: a policy over the rendezvous."""
