"""What rounds with noise leave behind: noise that later ones take back, and the account of what devices have paid."""
