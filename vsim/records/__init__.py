"""The import path of figures for users: `vsim.records.plots`."""
