"""JupyterLab in Chromium: every notebook opened, run and touched as a person would."""
