"""`python -m flashqla_hub finetune`: train a gated delta rule model on your own text through the kernel."""
