# Sourced by scripts/check, after environment.sh.

# Fails where a file of the project names a folder of the machine it was written on: the project's own, the one
# above it, or a home.
no_machine_paths() {
    local above patterns=() pattern found
    above="$(dirname "$root")"
    patterns+=("$root" '/(home|Users)/[a-z][a-z0-9_-]*/')
    [[ -n "${HOME:-}" && "$HOME" != / ]] && patterns+=("$HOME/")
    # Folders that every machine has say nothing about this one.
    case "$above" in
        / | /tmp | /opt | /srv | /usr/* | /var | /var/tmp | /home | /mnt) ;;
        *) patterns+=("$above/") ;;
    esac
    printf -v pattern '|%s' "${patterns[@]}"
    pattern="(^|[^A-Za-z0-9_.}-])(${pattern#|})"
    # -z: names with blanks; untracked files count, or the check would pass until they are committed.
    if ! git ls-files -z --cached --others --exclude-standard >/dev/null; then
        echo "error: machine paths: the project is not a git checkout, so its files are not known"
        return 1
    fi
    found="$(git ls-files -z --cached --others --exclude-standard | xargs -0 grep -nIE -- "$pattern" 2>/dev/null)"
    if [[ -n "$found" ]]; then
        echo "$found"
        return 1
    fi
    echo "none"
}
