// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The settings of the machine: defaults of options, and `smc config` to show the settings in
//! force.

use clap::{Args, Command};
use serde::Serialize;
use smc_core::wire::ids::Eid;
use smc_settings::{Place, PlaceReport, Settings};

use crate::error::CliError;
use crate::output;
use crate::run::Rule;

/// Help of `smc config`.
pub(crate) const LONG_ABOUT: &str = "\
Shows which settings are in force and where each comes from, and the places where programs look for
a fabric, in their order. An option of a command goes before the environment, the environment before
/etc/smc/smc.toml, and that before what programs find by themselves:

  1. /run/smc/pool: the device pool that \"smc cdi\" gives to a container
  2. /run/vhost-device-ism: the packaged service
  3. $XDG_RUNTIME_DIR/smc or /tmp/smc-UID: \"smc fabric\" of this user

The first place with a device that this user may use counts. A file with a mistake is an error of
every command that would use it. SMC_CONFIG names another file; if it is empty, no file counts.";

/// End of the help of `smc config`.
pub(crate) const AFTER: &str = "\
Keys of /etc/smc/smc.toml, each with a text, or where an option can be repeated also a list:
  device      as --device
  management  as --management of \"smc stat\"
  eids        as --eid
  rnics       as --rnic
  pnet        as --pnet
  rendezvous  as --rendezvous
  policy      as --policy of \"smc run\"
  peers       as --peer of \"smc run\"
  accept      as --accept of \"smc run\"
  always      as --always of \"smc run\"
  buffer      as --buffer
  spin-us     as --spin-us, a number
  outlive-device  as --outlive-device, true or false
  stay-on-tcp  as --stay-on-tcp, true or false
  go          as --go of \"smc run\", true or false

An example:
  rendezvous = \"auto\"
  peers = [\"10.1.0.0/16:6379\", \"*:5432\"]";

/// Options of `smc config`.
#[derive(Args, Debug)]
pub(crate) struct ConfigArgs {
    /// Print JSON: an object with the file, a list of settings and a list of places.
    #[arg(long)]
    json: bool,
}

/// The commands with defaults from the settings.
const COMMANDS: [&str; 5] = ["listen", "connect", "check", "run", "stat"];

/// Reads the settings, and checks the values understood by this program alone.
///
/// # Errors
/// The file cannot be read, or has a mistake.
pub(crate) fn load() -> Result<Settings, CliError> {
    let settings = Settings::load().map_err(|error| CliError::Settings(error.to_string()))?;
    let file = smc_settings::file().unwrap_or_default();
    let wrong =
        |key: &str, why: String| CliError::Settings(format!("{}: {key}: {why}", file.display()));
    for name in &settings.eids {
        Eid::new(name).map_err(|why| wrong("eids", format!("{name:?}: {why}")))?;
    }
    let rules =
        [("peers", &settings.peers), ("accept", &settings.accept), ("always", &settings.always)];
    for (key, rules) in rules {
        for rule in rules {
            rule.parse::<Rule>().map_err(|why| wrong(key, why.to_string()))?;
        }
    }
    Ok(settings)
}

/// A setting: its key, the option and the variable with precedence, and the values.
struct Entry {
    key: &'static str,
    /// Name of the option's field.
    id: &'static str,
    variable: Option<&'static str>,
    values: Vec<String>,
    /// The default without any setting.
    default: &'static str,
}

fn entries(settings: &Settings) -> Vec<Entry> {
    let path = |path: &Option<std::path::PathBuf>| {
        path.iter().map(|path| path.display().to_string()).collect::<Vec<_>>()
    };
    let entry = |key, id, variable, values: &[String], default| Entry {
        key,
        id,
        variable,
        values: values.to_vec(),
        default,
    };
    let number = |number: Option<u64>| number.iter().map(u64::to_string).collect::<Vec<_>>();
    let buffer = settings.buffer.and_then(|bytes| u64::try_from(bytes).ok());
    let switch = |on: Option<bool>| on.iter().map(bool::to_string).collect::<Vec<_>>();
    let how = settings.rendezvous.map(|how| how.word().to_owned());
    vec![
        entry("device", "device", Some("SMC_DEVICE"), &settings.device, ""),
        entry("management", "management", Some("SMC_MANAGEMENT"), &path(&settings.management), ""),
        entry("eids", "eids", Some("SMC_EID"), &settings.eids, "VIRTIO-ISM"),
        entry("rnics", "rnics", Some("SMC_RNIC"), &settings.rnics, "all"),
        entry("pnet", "pnet", None, &settings.pnet, "by network interface"),
        entry(
            "rendezvous",
            "rendezvous",
            Some("SMC_RENDEZVOUS"),
            how.as_slice(),
            "auto for \"smc run\" and \"smc check\", else off",
        ),
        entry("policy", "policy", Some("SMC_POLICY"), &path(&settings.policy), "none"),
        entry("peers", "peer", None, &settings.peers, "none"),
        entry("accept", "accept", None, &settings.accept, "all"),
        entry("always", "always", None, &settings.always, "none"),
        entry("buffer", "buffer", None, &number(buffer), "256K for \"smc run\", else 512K"),
        entry("spin-us", "spin_us", None, &number(settings.spin_us), "50"),
        entry("outlive-device", "outlive_device", None, &switch(settings.outlive_device), "true"),
        entry("stay-on-tcp", "stay_on_tcp", None, &switch(settings.stay_on_tcp), "false"),
        entry("go", "go", Some("SMC_GO"), &switch(settings.go), "false"),
    ]
}

/// The command line, with the settings as defaults of its options.
pub(crate) fn applied(command: Command, settings: &Settings) -> Command {
    if *settings == Settings::default() {
        return command;
    }
    let entries = entries(settings);
    let known: Vec<_> =
        COMMANDS.iter().filter(|name| command.find_subcommand(name).is_some()).collect();
    known.into_iter().fold(command, |command, name| {
        command.mut_subcommand(name, |mut command| {
            for Entry { id, values, .. } in entries.iter().filter(|entry| !entry.values.is_empty())
            {
                if command.get_arguments().any(|option| option.get_id().as_str() == *id) {
                    // Defaults of options live as long as the process.
                    let values = values.iter().map(|value| &*value.clone().leak());
                    let values: Vec<&'static str> = values.collect();
                    command = command.mut_arg(id, |option| option.default_values(values));
                }
            }
            command
        })
    })
}

/// A setting in the output.
#[derive(Debug, Serialize)]
struct Shown {
    key: &'static str,
    value: String,
    from: String,
}

/// A place in the output.
#[derive(Debug, Serialize)]
struct ShownPlace {
    place: String,
    directory: String,
    /// Sockets of devices accessible to this user.
    sockets: Vec<String>,
    /// Why there is none.
    problem: Option<String>,
    /// Whether programs use the place, unless a device is named.
    used: bool,
}

fn places() -> Vec<ShownPlace> {
    let mut places: Vec<_> = Place::ALL.into_iter().map(PlaceReport::at).map(place).collect();
    if let Some(first) = places.iter_mut().find(|place| place.problem.is_none()) {
        first.used = true;
    }
    places
}

fn place(looked: PlaceReport) -> ShownPlace {
    let (sockets, problem) = match &looked.sockets {
        Ok(sockets) => {
            let names = sockets.iter().filter_map(|socket| socket.file_name());
            (names.map(|name| name.to_string_lossy().into_owned()).collect(), None)
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            (Vec::new(), Some("no daemon's socket".to_owned()))
        }
        Err(error) => (Vec::new(), Some(error.to_string())),
    };
    ShownPlace {
        place: looked.place.to_string(),
        directory: looked.directory.display().to_string(),
        sockets,
        problem,
        used: false,
    }
}

/// The settings in force, with their sources.
fn in_force(settings: &Settings, places: &[ShownPlace]) -> Vec<Shown> {
    let file = smc_settings::file().unwrap_or_default().display().to_string();
    let found = |key| match key {
        "device" => {
            let used = places.iter().find(|place| place.used)?;
            Some((used.directory.clone(), used.place.clone()))
        }
        "management" => {
            let socket = smc_settings::find_management().ok()?;
            Some((socket.display().to_string(), "found".to_owned()))
        }
        _ => None,
    };
    let shown = |entry: Entry| {
        let set = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        let variable = entry.variable.and_then(|name| Some((set(name)?, format!("${name}"))));
        let of_file = || match &entry.values[..] {
            [] => None,
            values => Some((values.join(", "), file.clone())),
        };
        let nothing = match entry.default {
            "" => "none found",
            default => default,
        };
        let default = || (nothing.to_owned(), "default".to_owned());
        let known = variable.or_else(of_file).or_else(|| found(entry.key));
        let (value, from) = known.unwrap_or_else(default);
        Shown { key: entry.key, value, from }
    };
    entries(settings).into_iter().map(shown).collect()
}

/// Shows the settings.
///
/// # Errors
/// The file has a mistake, or standard output cannot be written.
pub(crate) fn run(args: &ConfigArgs) -> Result<(), CliError> {
    let settings = load()?;
    let places = places();
    let settings = in_force(&settings, &places);
    let file = smc_settings::file();
    let text = match args.json {
        true => {
            let all = serde_json::json!({ "file": file, "settings": settings, "places": places });
            format!("{all}\n")
        }
        false => as_text(file.as_deref(), &settings, &places),
    };
    output::print(&text)
}

fn as_text(file: Option<&std::path::Path>, settings: &[Shown], places: &[ShownPlace]) -> String {
    let mut text = match file {
        Some(file) if file.exists() => format!("file: {}\n\n", file.display()),
        Some(file) => format!("file: {} (does not exist)\n\n", file.display()),
        None => "file: none, since SMC_CONFIG is empty\n\n".to_owned(),
    };
    for Shown { key, value, from } in settings {
        text += &format!("{key:<11} {value}\n");
        if from != "default" {
            text += &format!("{:11}   from {from}\n", "");
        }
    }
    text += "\nA fabric is looked for in this order:\n";
    for place in places {
        let mark = if place.used { "->" } else { "" };
        let what = match &place.problem {
            Some(problem) => problem.clone(),
            None => place.sockets.join(" "),
        };
        text += &format!("{mark:>2} {}: {}\n", place.directory, place.place);
        text += &format!("     {what}\n");
    }
    output::printable(&text) + "\n"
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[derive(clap::Parser)]
    enum Line {
        Run {
            #[arg(long = "peer", value_delimiter = ',')]
            peer: Vec<String>,
            #[arg(long, default_value_t = 50)]
            spin_us: u64,
        },
        Listen {
            #[arg(long)]
            device: Option<String>,
        },
        Connect,
        Check,
        Stat,
    }

    fn parsed(settings: &Settings, line: &[&str]) -> Line {
        let command = applied(Line::command(), settings);
        let matches = command.try_get_matches_from(line).unwrap();
        clap::FromArgMatches::from_arg_matches(&matches).unwrap()
    }

    #[test]
    fn settings_are_defaults_and_options_go_before_them() {
        let settings = Settings {
            device: vec!["/run/x.sock".into()],
            peers: vec!["*:1".into(), "*:2".into()],
            spin_us: Some(7),
            ..Settings::default()
        };
        let Line::Run { peer, spin_us } = parsed(&settings, &["smc", "run"]) else { panic!() };
        assert_eq!((peer.as_slice(), spin_us), (["*:1".into(), "*:2".into()].as_slice(), 7));
        let Line::Run { peer, .. } = parsed(&settings, &["smc", "run", "--peer", "*:3"]) else {
            panic!()
        };
        assert_eq!(peer, ["*:3"]);
        let Line::Listen { device } = parsed(&settings, &["smc", "listen"]) else { panic!() };
        assert_eq!(device.as_deref(), Some("/run/x.sock"));
    }

    #[test]
    fn each_setting_is_shown_with_its_source() {
        let settings = Settings { buffer: Some(64 << 10), ..Settings::default() };
        let shown = in_force(&settings, &[]);
        let of = |key| shown.iter().find(|shown| shown.key == key).unwrap();
        assert_eq!((of("buffer").value.as_str(), of("spin-us").value.as_str()), ("65536", "50"));
        assert!(of("buffer").from.ends_with("smc.toml"), "{shown:?}");
        assert_eq!(of("spin-us").from, "default");
    }
}
