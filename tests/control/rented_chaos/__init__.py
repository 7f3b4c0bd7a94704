"""Jobs on a faulty simulated cloud under a control plane that is killed again and again, and what is left of them."""
