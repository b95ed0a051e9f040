"""Texts of requests: tokens as they grow, strings out of them, where they end, how they show."""
