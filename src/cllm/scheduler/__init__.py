"""Decides what each step computes, and for which sequences. Computes nothing itself."""
