"""Dashboards as Python, from which the JSON that Grafana loads is made."""
