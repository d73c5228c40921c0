//! `castiron completions` and `castiron man`: made from the one table of flags.

use std::path::PathBuf;

use anyhow::{Context, anyhow};
use clap::{Command, CommandFactory};
use clap_complete::Shell;

use crate::args::Args;
use crate::failure::Failure;
use crate::output::{self, WholeFile};

/// Arguments of `completions`.
#[derive(clap::Args)]
pub struct Completions {
    /// The shell.
    pub shell: Shell,
}

/// Arguments of `man`.
#[derive(clap::Args)]
pub struct Man {
    /// The command to describe; the program as a whole when not given.
    pub command: Option<String>,
    /// Write the pages of the program and of every command into this folder.
    #[arg(long, value_name = "DIR", conflicts_with = "command")]
    pub out: Option<PathBuf>,
}

/// Prints a completion script.
pub fn completions(args: &Completions) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Args::command(), "castiron", &mut script);
    output::say(&mut std::io::stdout().lock(), &String::from_utf8_lossy(&script))
}

/// Prints a manual page, or writes all of them.
pub fn man(args: &Man) -> Result<(), Failure> {
    let mut program = Args::command();
    program.build();
    if let Some(folder) = &args.out {
        let shown = program.get_subcommands().filter(|c| !c.is_hide_set() && c.get_name() != "help");
        for command in std::iter::once(&program).chain(shown) {
            let name = command.get_display_name().unwrap_or(command.get_name());
            let mut file = WholeFile::create(&folder.join(format!("{name}.1")))?;
            file.write(&page(command)?)?;
            file.finish()?;
        }
        return Ok(());
    }
    let command = match &args.command {
        None => &program,
        Some(name) => program.find_subcommand(name).ok_or_else(|| {
            Failure::input(anyhow!("there is no command {name}; castiron --help lists them"))
        })?,
    };
    output::say(&mut std::io::stdout().lock(), &String::from_utf8_lossy(&page(command)?))
}

fn page(command: &Command) -> Result<Vec<u8>, Failure> {
    let mut page = Vec::new();
    let man = clap_mangen::Man::new(command.clone());
    man.render(&mut page).context("writing a manual page").map_err(Failure::job)?;
    Ok(page)
}
