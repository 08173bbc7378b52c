"""Checks of Soapstone on a GPU, in pieces, with a report."""
