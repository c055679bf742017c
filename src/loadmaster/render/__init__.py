"""Findings, load sheets and models as text, JSON and SVG. All units that people read are written here."""
