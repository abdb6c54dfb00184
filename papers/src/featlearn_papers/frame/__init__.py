"""What all figures share: experiments and their seeds, claims, drawing, kept results, the command."""
