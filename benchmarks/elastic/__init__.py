"""Workers that come and go, compared with undisturbed and with restarted trainings."""
