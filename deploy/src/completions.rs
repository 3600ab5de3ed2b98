//! `paraft completions`: the scripts that clap writes for shells, with the keys of the job file after
//! `--set`.

use clap::Command;
use clap_complete::Shell;
use paraft_worker::job::job_keys;

/// Bash splits words at `=`.
const BASH: &str = r#"_paraft_keys() {
    local cur=$2 before=$3
    [[ $before != = ]] || before=${COMP_WORDS[COMP_CWORD - 2]}
    [[ $before != --set || $cur == = ]] || {
        COMPREPLY=($(compgen -W "KEYS" -S = -- "$cur"))
        compopt -o nospace 2>/dev/null || true
        return
    }
    _paraft "$@"
}

"#;

const ZSH: &str = "(( $+functions[_paraft_keys] )) ||
_paraft_keys() {
    compadd -S = -- KEYS
}

";

const FISH: &str = r#"function __fish_paraft_keys
    printf "%s=\n" KEYS
end

"#;

/// The script for a shell.
pub fn script(shell: Shell, mut cli: Command) -> String {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut cli, "paraft", &mut script);
    let script = String::from_utf8_lossy(&script).into_owned();
    let with_keys = |text: &str| text.replace("KEYS", &job_keys().join(" "));
    match shell {
        Shell::Bash => with_keys(BASH) + &script.replace("complete -F _paraft ", "complete -F _paraft_keys "),
        Shell::Zsh => {
            let script = script.replace(":KEY=VALUE:_default'", ":KEY=VALUE:_paraft_keys'");
            // What follows calls the first function.
            let last = "if [ \"$funcstack[1]\" = \"_paraft\" ]";
            script.replace(last, &(with_keys(ZSH) + last))
        }
        Shell::Fish => {
            let keys = |line: &str| match line.contains(" -l set ") {
                true => format!("{line} -f -a \"(__fish_paraft_keys)\"\n"),
                false => format!("{line}\n"),
            };
            with_keys(FISH) + &script.lines().map(keys).collect::<String>()
        }
        _ => script,
    }
}
