"""RAGEN: small worlds of one turn (bandit) or several (FrozenLake, Sokoban), with several actions per turn."""
