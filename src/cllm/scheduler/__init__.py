"""Decides what each step computes and for whom; computes nothing itself."""
