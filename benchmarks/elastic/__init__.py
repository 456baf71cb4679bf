"""Workers that come and go, beside trainings that nobody disturbs and that restart."""
