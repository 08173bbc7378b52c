# Sourced by scripts/check, after environment.sh.

# Fails where a line of Markdown is too long to be read beside code. Rows of tables cannot be broken.
markdown_lines_fit() {
    git ls-files -z --cached --others --exclude-standard -- '*.md' | xargs -0 awk '
        length > 120 && !/^\|/ { print FILENAME ":" FNR ": is " length " characters long, must be at most 120"; long = 1 }
        END { exit long }' && echo "none longer than 120 characters"
}
