// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The file of settings.

use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Deserializer, Serialize};
use thiserror::Error;

/// The file of this machine.
const FILE: &str = "/etc/smc/smc.toml";
/// The environment variable with the name of another file; empty: no file is read.
const VARIABLE: &str = "SMC_CONFIG";
/// The longest accepted file, bytes.
const MAX_LEN: u64 = 1 << 20;

/// Settings of a machine: defaults of programs, below options and environment variables.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Settings {
    /// Devices: sockets, directories of sockets, PCI addresses, "pci" or "none". Empty: programs
    /// look for a fabric.
    #[serde(deserialize_with = "one_or_more")]
    pub device: Vec<String>,
    /// Management socket of the daemon.
    pub management: Option<PathBuf>,
    /// User EIDs.
    #[serde(deserialize_with = "one_or_more")]
    pub eids: Vec<String>,
    /// RNICs for SMC-R, or "none".
    #[serde(deserialize_with = "one_or_more")]
    pub rnics: Vec<String>,
    /// Physical networks, as NAME=ID.
    #[serde(deserialize_with = "one_or_more")]
    pub pnet: Vec<String>,
    /// How programs find out whether a peer speaks SMC.
    pub rendezvous: Option<Rendezvous>,
    /// File of rules about peers, ports and programs.
    pub policy: Option<PathBuf>,
    /// Servers with SMC, as rules.
    #[serde(deserialize_with = "one_or_more")]
    pub peers: Vec<String>,
    /// Clients with the right to use SMC, as rules.
    #[serde(deserialize_with = "one_or_more")]
    pub accept: Vec<String>,
    /// Servers with SMC for short connections, too, as rules.
    #[serde(deserialize_with = "one_or_more")]
    pub always: Vec<String>,
    /// Receive buffer of a connection, bytes.
    #[serde(deserialize_with = "buffer")]
    pub buffer: Option<usize>,
    /// Time of polling before a wait sleeps, microseconds.
    pub spin_us: Option<u64>,
    /// Whether connections go on over TCP when their device is gone.
    pub outlive_device: Option<bool>,
    /// Whether connections without their device stay on TCP after the device's return.
    pub stay_on_tcp: Option<bool>,
    /// Whether programs in Go are put on SMC.
    pub go: Option<bool>,
}

/// How a program finds out whether a peer speaks SMC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Rendezvous {
    /// Not by TCP option 254.
    Off,
    /// By TCP option 254 if possible.
    Auto,
    /// By TCP option 254; without the option all connections are TCP.
    Required,
}

impl Rendezvous {
    /// The setting's word in files, options and the environment.
    pub fn word(self) -> &'static str {
        match self {
            Rendezvous::Off => "off",
            Rendezvous::Auto => "auto",
            Rendezvous::Required => "required",
        }
    }
}

/// The settings cannot be read.
#[derive(Debug, Error)]
pub enum SettingsError {
    /// The file cannot be read.
    #[error("{0}: {1}")]
    Io(PathBuf, std::io::Error),
    /// The file is too long, or no file.
    #[error("{0}: it is no file of at most {MAX_LEN} bytes")]
    NoFile(PathBuf),
    /// The file is no TOML, or has a key or value without meaning.
    #[error("{0}: {1}")]
    Format(PathBuf, Box<toml::de::Error>),
    /// A path dependent on the working directory of a program.
    #[error("{file}: {key} = {value:?} is not an absolute path")]
    Relative {
        /// The file.
        file: PathBuf,
        /// The key.
        key: &'static str,
        /// The path.
        value: PathBuf,
    },
}

/// The file of settings: `/etc/smc/smc.toml`, or the file named by SMC_CONFIG. `None`: SMC_CONFIG is empty,
/// and no file counts.
pub fn file() -> Option<PathBuf> {
    match std::env::var_os(VARIABLE) {
        Some(named) if named.is_empty() => None,
        Some(named) => Some(named.into()),
        None => Some(FILE.into()),
    }
}

/// The policy file of this machine, where nothing names another one: `policy.toml` beside the file of
/// settings. The file may be missing.
pub fn policy_file() -> Option<PathBuf> {
    Some(file()?.parent()?.join("policy.toml"))
}

impl Settings {
    /// Reads the file of settings. If `/etc/smc/smc.toml` does not exist, nothing is set.
    ///
    /// # Errors
    /// See [`SettingsError`].
    pub fn load() -> Result<Settings, SettingsError> {
        let Some(file) = file() else { return Ok(Settings::default()) };
        match Settings::read(&file) {
            Err(SettingsError::Io(path, error))
                if error.kind() == ErrorKind::NotFound && path == Path::new(FILE) =>
            {
                Ok(Settings::default())
            }
            other => other,
        }
    }

    fn read(path: &Path) -> Result<Settings, SettingsError> {
        let failed = |error| SettingsError::Io(path.into(), error);
        // A FIFO would block.
        if !path.metadata().map_err(failed)?.is_file() {
            return Err(SettingsError::NoFile(path.into()));
        }
        let mut text = String::new();
        let file = std::fs::File::open(path).map_err(failed)?;
        file.take(MAX_LEN + 1).read_to_string(&mut text).map_err(failed)?;
        if text.len() as u64 > MAX_LEN {
            return Err(SettingsError::NoFile(path.into()));
        }
        Settings::parse(&text, path)
    }

    fn parse(text: &str, path: &Path) -> Result<Settings, SettingsError> {
        let settings: Settings = toml::from_str(text)
            .map_err(|error| SettingsError::Format(path.into(), Box::new(error)))?;
        let devices = settings.device.iter().filter(|device| device.contains('/'));
        let paths = devices.map(|device| ("device", Path::new(device)));
        let others = [("management", &settings.management), ("policy", &settings.policy)];
        let others = others.into_iter().filter_map(|(key, path)| Some((key, path.as_deref()?)));
        let relative = paths.chain(others).find(|(_, path)| !path.is_absolute());
        if let Some((key, value)) = relative {
            let (file, value) = (path.into(), value.into());
            return Err(SettingsError::Relative { file, key, value });
        }
        Ok(settings)
    }
}

/// Reads one text, or a list of at least one.
fn one_or_more<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
    use serde::de::Error;

    #[derive(Deserialize)]
    #[serde(untagged, expecting = "expected a text or a list of texts")]
    enum OneOrMore {
        One(String),
        More(Vec<String>),
    }
    let list = match OneOrMore::deserialize(from)? {
        OneOrMore::One(one) => vec![one],
        OneOrMore::More(more) => more,
    };
    if list.is_empty() {
        return Err(D::Error::custom("an empty list: leave the key out"));
    }
    match list.iter().find(|text| text.is_empty() || text.contains(',')) {
        None => Ok(list),
        Some(wrong) => Err(D::Error::custom(format!("{wrong:?} is no single entry of a list"))),
    }
}

fn buffer<'de, D: Deserializer<'de>>(from: D) -> Result<Option<usize>, D::Error> {
    let text = String::deserialize(from)?;
    parse_buffer(&text).map(Some).map_err(serde::de::Error::custom)
}

/// Reads the size of a receive buffer, such as "256K". Another size would be rounded without a message.
///
/// # Errors
/// The size is no power of two from 16K to 1M.
pub fn parse_buffer(text: &str) -> Result<usize, String> {
    let wrong = || format!("{text:?} is not a size of a buffer: 16K to 1M, a power of two");
    let (digits, shift) = match text.char_indices().last() {
        Some((end, 'k' | 'K')) => (text.get(..end), 10),
        Some((end, 'm' | 'M')) => (text.get(..end), 20),
        _ => (Some(text), 0),
    };
    let number: usize = digits.unwrap_or_default().parse().map_err(|_| wrong())?;
    let size = number.checked_mul(1 << shift).ok_or_else(wrong)?;
    match size.is_power_of_two() && (16 << 10..=1 << 20).contains(&size) {
        true => Ok(size),
        false => Err(wrong()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Settings, String> {
        Settings::parse(text, Path::new("/etc/smc/smc.toml")).map_err(|error| error.to_string())
    }

    #[test]
    fn every_key_is_read() {
        let text = r#"
            device = ["/run/a.sock", "pci"]
            management = "/run/m.sock"
            eids = ["ONE", "TWO"]
            rnics = "none"
            pnet = ["eth0=NET1"]
            rendezvous = "required"
            policy = "/etc/smc/policy.toml"
            peers = ["10.0.0.0/8:6379"]
            accept = ["*"]
            always = ["*:80"]
            buffer = "256K"
            spin-us = 0
            outlive-device = true
            stay-on-tcp = true
            go = true
        "#;
        let settings = parse(text).unwrap();
        assert_eq!(settings.device, ["/run/a.sock", "pci"]);
        assert_eq!(settings.rnics, ["none"]);
        assert_eq!(settings.rendezvous.map(Rendezvous::word), Some("required"));
        assert_eq!((settings.buffer, settings.spin_us), (Some(256 << 10), Some(0)));
        assert_eq!([settings.outlive_device, settings.stay_on_tcp, settings.go], [Some(true); 3]);
        assert_eq!(parse("").unwrap(), Settings::default());
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_its_value() {
        for (text, says) in [
            ("devices = []", "unknown field `devices`"),
            ("eids = []", "an empty list"),
            ("eids = [\"A,B\"]", "\"A,B\" is no single entry"),
            ("peers = 7", "a text or a list of texts"),
            ("rendezvous = \"on\"", "unknown variant `on`"),
            ("buffer = \"300K\"", "\"300K\" is not a size of a buffer"),
            ("buffer = \"18446744073709551615M\"", "is not a size of a buffer"),
            ("spin-us = -1", "-1"),
            ("outlive-device = \"yes\"", "expected a boolean"),
            ("device = \"run/a.sock\"", "device = \"run/a.sock\" is not an absolute path"),
            ("policy = \"policy.toml\"", "policy = \"policy.toml\" is not an absolute path"),
            ("device", "line 1"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.starts_with("/etc/smc/smc.toml: ") && error.contains(says), "{error}");
        }
    }

    #[test]
    fn a_buffer_has_a_size_that_the_protocol_has() {
        assert_eq!((parse_buffer("16K"), parse_buffer("1m")), (Ok(16 << 10), Ok(1 << 20)));
        for bad in ["3K", "8K", "48K", "2M", "0", "x", "", "K"] {
            assert!(parse_buffer(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_file_that_is_named_has_to_be_there() {
        let missing = Settings::read(Path::new("/nonexistent/smc.toml")).unwrap_err();
        assert!(matches!(missing, SettingsError::Io(..)), "{missing}");
        let directory = Settings::read(Path::new("/")).unwrap_err();
        assert!(matches!(directory, SettingsError::NoFile(_)), "{directory}");
    }
}
