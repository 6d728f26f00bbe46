// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The configuration file of a daemon.

use std::fs::File as FsFile;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use toml::Spanned;
use virtio_ism_abi::Chid;

use super::bounds::{LeaveTime, parse_chid, parse_gid, parse_mode, size};
use super::error::ConfigError;
use super::spec::{Caps, FabricSpec, GuestSpec, Quotas};
use super::whole::Config;

/// Most bytes of a file.
const MAX_FILE: u64 = 1 << 20;

/// The file of `--config`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct File {
    management: Option<PathBuf>,
    metrics: Option<PathBuf>,
    #[serde(default, deserialize_with = "size")]
    window_size: Option<u64>,
    move_queues: Option<u16>,
    stopped_grace: Option<u64>,
    leave_timeout: Option<LeaveTime>,
    socket_mode: Option<Spanned<String>>,
    #[serde(default)]
    fabric: Vec<Spanned<FileFabric>>,
    #[serde(default)]
    guest: Vec<Spanned<FileGuest>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct FileFabric {
    chid: String,
    #[serde(default)]
    caps: Caps,
    #[serde(default)]
    quotas: Quotas,
}

/// A guest in a file, and also the body of the management command for adding a guest.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct FileGuest {
    pub(crate) socket: PathBuf,
    pub(crate) name: Option<String>,
    pub(crate) chid: Option<String>,
    pub(crate) gid: Option<String>,
    pub(crate) max_maps: Option<u32>,
    #[serde(default)]
    pub(crate) allow_any_file: bool,
    pub(crate) mode: Option<String>,
    pub(crate) devices: Option<u32>,
    pub(crate) peer_uid: Option<u32>,
    pub(crate) peer_gid: Option<u32>,
    #[serde(default)]
    pub(crate) vfio_user: bool,
}

impl FileGuest {
    pub(crate) fn into_spec(self, default_chid: Chid) -> Result<GuestSpec, ConfigError> {
        let mut spec = GuestSpec::new(self.socket);
        if let Some(name) = self.name {
            spec.name = name;
        }
        spec.chid = self.chid.as_deref().map_or(Ok(default_chid), parse_chid)?;
        spec.gid = self.gid.as_deref().map(parse_gid).transpose()?;
        spec.max_maps = self.max_maps;
        spec.allow_any_file = self.allow_any_file;
        spec.mode = self.mode.as_deref().map(parse_mode).transpose()?;
        spec.devices = self.devices;
        spec.peer_uid = self.peer_uid;
        spec.peer_gid = self.peer_gid;
        spec.vfio_user = self.vfio_user;
        spec.check()?;
        Ok(spec)
    }
}

/// Reads the text of a file opened at `path`.
///
/// # Errors
/// The file cannot be read, is not UTF-8, or is too long.
pub(crate) fn read_text(file: FsFile, path: &Path) -> Result<String, ConfigError> {
    let mut text = String::new();
    let read = file.take(MAX_FILE + 1).read_to_string(&mut text);
    read.map_err(|source| ConfigError::Read { path: path.into(), source })?;
    if text.len() as u64 > MAX_FILE {
        return Err(ConfigError::TooLong { path: path.into(), limit: MAX_FILE });
    }
    Ok(text)
}

impl Config {
    /// Reads the text of a TOML file (see the README for its keys): the valid part, and all mistakes.
    /// [`mistakes`](Config::mistakes) finds the mistakes of the whole; this function does not.
    pub(crate) fn from_toml(text: &str, path: &Path) -> (Config, Vec<ConfigError>) {
        let mut config = Config::default();
        let file: File = match toml::from_str(text) {
            Ok(file) => file,
            Err(source) => {
                let source = Box::new(source);
                return (config, vec![ConfigError::Syntax { path: path.into(), source }]);
            }
        };
        let mut mistakes = Vec::new();
        config.management = file.management;
        config.metrics = file.metrics;
        config.window_size = file.window_size.unwrap_or(config.window_size);
        config.move_queues = file.move_queues.unwrap_or(config.move_queues);
        if let Some(seconds) = file.stopped_grace {
            config.stopped_grace = (seconds != 0).then(|| Duration::from_secs(seconds));
        }
        if let Some(LeaveTime(within)) = file.leave_timeout {
            config.leave_timeout = within;
        }
        let table = |start: usize, source: ConfigError| ConfigError::Table {
            path: path.into(),
            line: text.get(..start).unwrap_or_default().matches('\n').count() + 1,
            source: Box::new(source),
        };
        if let Some(mode) = file.socket_mode {
            match parse_mode(mode.get_ref()) {
                Ok(mode) => config.socket_mode = mode,
                Err(mistake) => mistakes.push(table(mode.span().start, mistake)),
            }
        }
        if !file.fabric.is_empty() {
            config.fabrics.clear();
        }
        for fabric in file.fabric {
            let start = fabric.span().start;
            let FileFabric { chid, caps, quotas } = fabric.into_inner();
            match parse_chid(&chid) {
                Ok(chid) => config.fabrics.push(FabricSpec { chid, caps, quotas }),
                Err(mistake) => mistakes.push(table(start, mistake)),
            }
        }
        let default_chid = config.default_chid();
        for guest in file.guest {
            let start = guest.span().start;
            match guest.into_inner().into_spec(default_chid) {
                Ok(spec) => config.guests.push(spec),
                Err(mistake) => mistakes.push(table(start, mistake)),
            }
        }
        (config, mistakes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn toml(text: &str) -> Result<Config, ConfigError> {
        let (config, mut mistakes) = Config::from_toml(text, Path::new("test.toml"));
        mistakes.extend(config.mistakes());
        match mistakes.into_iter().next() {
            Some(ConfigError::Table { source, .. }) => Err(*source),
            Some(mistake) => Err(mistake),
            None => Ok(config),
        }
    }

    #[test]
    fn reads_fabrics_and_guests_from_a_file() {
        let config = toml(
            r#"
            management = "/run/ism/mgmt.sock"
            window-size = 1073741824
            stopped-grace = 0
            leave-timeout = 2.5
            socket-mode = "660"
            [[fabric]]
            chid = "ff10"
            caps = { devices = 3 }
            quotas = { max-dmbs = 5 }
            [[guest]]
            socket = "/run/ism/a.sock"
            [[guest]]
            socket = "/run/ism/b.sock"
            name = "bee"
            allow-any-file = true
            "#,
        )
        .unwrap();
        assert_eq!(config.socket_mode, 0o660);
        assert_eq!(config.stopped_grace, None);
        assert_eq!(config.leave_timeout, Duration::from_millis(2500));
        assert_eq!(config.fabrics[0].quotas.max_dmbs, Some(5));
        assert_eq!(config.fabrics[0].caps.devices, Some(3));
        assert_eq!(config.guests[0].chid, Chid(0xff10));
        assert_eq!(config.guests[1].name, "bee");
    }

    #[test]
    fn refuses_contradictions() {
        let guest = "[[guest]]\nsocket = \"/a/x.sock\"\n";
        assert!(matches!(toml("colour = 1"), Err(ConfigError::Syntax { .. })));
        assert!(matches!(
            toml(&format!("{guest}{guest}")),
            Err(ConfigError::DuplicateName(name)) if name == "x"
        ));
        assert!(matches!(
            toml(&format!("{guest}{guest}name=\"y\"")),
            Err(ConfigError::DuplicateSocket(_))
        ));
        assert!(matches!(
            toml(&format!("{guest}chid = \"ff01\"")),
            Err(ConfigError::UnknownFabric { chid: Chid(0xff01), .. })
        ));
        assert!(matches!(toml("window-size = 3"), Err(ConfigError::WindowSize(3))));
        assert!(matches!(toml("move-queues = 63"), Err(ConfigError::MoveQueues(63))));
        assert!(matches!(
            toml("[[fabric]]\nchid=\"ff00\"\n[[fabric]]\nchid=\"ff00\""),
            Err(ConfigError::DuplicateChid(_))
        ));
        assert!(matches!(
            toml("[[guest]]\nsocket=\"/a\"\nname=\"a\\tb\""),
            Err(ConfigError::Name(_))
        ));
    }

    #[test]
    fn sizes_are_numbers_or_have_suffixes() {
        let config = toml(
            "window-size = \"1G\"\n[[fabric]]\nchid = \"ff00\"\n\
                           quotas = { max-slab-bytes = \"2M\", max-dmb-bytes = 4096 }",
        )
        .unwrap();
        assert_eq!(config.window_size, 1 << 30);
        assert_eq!(config.fabrics[0].quotas.max_slab_bytes, Some(2 << 20));
        assert_eq!(config.fabrics[0].quotas.max_dmb_bytes, Some(4096));
        assert_eq!(toml("leave-timeout = 3").unwrap().leave_timeout, Duration::from_secs(3));
        let refused = toml("leave-timeout = -1").unwrap_err().to_string();
        assert!(refused.contains("-1 is no number of seconds"), "{refused}");
        let refused = toml("window-size = \"big\"").unwrap_err().to_string();
        assert!(refused.contains("\"big\" is not a size"), "{refused}");
    }

    #[test]
    fn every_mistake_is_found_with_its_line() {
        let text = "socket-mode = \"9\"\n[[fabric]]\nchid = \"zzzz\"\n\n[[guest]]\n\
                    socket = \"/a\"\nmode = \"rw\"\n[[guest]]\nsocket = \"/b\"\ngid = \"1\"\n";
        let (_, mistakes) = Config::from_toml(text, Path::new("t.toml"));
        let said: Vec<String> = mistakes.iter().map(ToString::to_string).collect();
        let starts = [
            "t.toml:1: socket mode \"9\"",
            "t.toml:2: \"zzzz\"",
            "t.toml:5: socket mode \"rw\"",
            "t.toml:8: \"1\"",
        ];
        assert_eq!(said.len(), starts.len(), "{said:#?}");
        for (said, start) in said.iter().zip(starts) {
            assert!(said.starts_with(start), "{said}, not {start}");
        }
    }
}
