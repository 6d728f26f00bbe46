// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Rereads the configuration: guests come and go, without effect on unchanged guests.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use serde::{Deserialize, Serialize};
use virtio_ism_abi::Chid;
use virtio_ism_abi::event::LeaveReason;

use crate::config::log_output::LogOutput;
use crate::config::{Config, ConfigError, FabricSpec, GuestSpec, Socket};
use crate::service::error::DaemonError;
use crate::service::guests::Guests;
use crate::vhost::counted_threads::CountedThreads;
use crate::vhost::device_socket::STOP;
use ism_device::sync::lock;

/// Reads the present configuration. The error has every mistake.
pub(crate) type ConfigSource = Box<dyn Fn() -> Result<Config, Vec<ConfigError>> + Send + Sync>;

/// Changes by a reread configuration: names of guests.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ReloadInfo {
    /// Newly served guests.
    pub added: Vec<String>,
    /// Removed guests.
    pub removed: Vec<String>,
    /// Guests with changed settings. Their front ends have lost their devices.
    pub changed: Vec<String>,
    /// Why guests of the new configuration are not served.
    pub failed: Vec<String>,
}

/// Called with the result of a reload.
type OnReloaded = Box<dyn FnOnce(Result<ReloadInfo, DaemonError>) + Send>;

/// Rereads a daemon's configuration on request. A thread of its own does this, while there is work: the file
/// may be slow to read, and front ends slow to leave.
pub(crate) struct Reload {
    guests: Arc<Guests>,
    read: Option<ConfigSource>,
    requests: Mutex<Requests>,
    thread: CountedThreads,
}

#[derive(Default)]
struct Requests {
    waiting: VecDeque<OnReloaded>,
    is_running: bool,
}

impl Reload {
    /// Without `read` there is no configuration to reread.
    pub(crate) fn new(guests: Arc<Guests>, read: Option<ConfigSource>) -> Reload {
        Reload { guests, read, requests: Mutex::default(), thread: CountedThreads::default() }
    }

    /// Rereads the configuration, after earlier requests, and calls `done` with the result.
    pub(crate) fn request(
        self: &Arc<Self>,
        done: impl FnOnce(Result<ReloadInfo, DaemonError>) + Send + 'static,
    ) {
        let mut requests = lock(&self.requests);
        requests.waiting.push_back(Box::new(done));
        if requests.is_running {
            return;
        }
        requests.is_running = true;
        drop(requests);
        let reload = self.clone();
        let started = self.thread.spawn("reload", move || {
            while let Some(done) = reload.next() {
                done(reload.run());
            }
        });
        if let Err(error) = started {
            tracing::error!(%error, "no thread reads the configuration again");
            let requests = std::mem::take(&mut *lock(&self.requests));
            for done in requests.waiting {
                done(Err(DaemonError::Thread(io::Error::other(error.to_string()))));
            }
        }
    }

    /// Waits for the end of all requests, at the latest until `deadline`.
    pub(crate) fn wait_done(&self, deadline: Instant) -> bool {
        self.thread.wait_for(0, deadline.saturating_duration_since(Instant::now()))
    }

    fn next(&self) -> Option<OnReloaded> {
        let mut requests = lock(&self.requests);
        let next = requests.waiting.pop_front();
        requests.is_running = next.is_some();
        next
    }

    /// Rereads the configuration and carries out its changes. Also logs the result.
    ///
    /// # Errors
    /// The configuration is wrong, a change takes a restart, or the socket of a new guest cannot be made.
    /// Then nothing has changed.
    fn run(&self) -> Result<ReloadInfo, DaemonError> {
        let done = self.read_and_apply();
        match &done {
            Ok(ReloadInfo { added, removed, changed, failed }) => {
                let words = |names: &[String]| names.join(" ");
                let (added, removed, changed) = (words(added), words(removed), words(changed));
                tracing::info!(added, removed, changed, "the configuration was read again");
                for error in failed {
                    tracing::error!("{}", LogOutput(error));
                }
            }
            Err(error) => {
                tracing::error!(
                    "the configuration was read again, and nothing is changed: {}",
                    LogOutput(error)
                );
            }
        }
        done
    }

    fn read_and_apply(&self) -> Result<ReloadInfo, DaemonError> {
        let read = self.read.as_ref().ok_or(DaemonError::NoConfigFile)?;
        let config = read().map_err(DaemonError::Mistakes)?;
        let restart = self.takes_restart(&config);
        if !restart.is_empty() {
            return Err(DaemonError::Restart(restart));
        }
        self.apply(&config)
    }

    /// Changed settings requiring a restart.
    fn takes_restart(&self, new: &Config) -> Vec<String> {
        let now = self.guests.config();
        let mut settings = Vec::new();
        for (name, differs) in [
            ("management", now.management != new.management),
            ("metrics", now.metrics != new.metrics),
            ("window-size", now.window_size != new.window_size),
            ("move-queues", now.move_queues != new.move_queues),
            ("stopped-grace", now.stopped_grace != new.stopped_grace),
            ("leave-timeout", now.leave_timeout != new.leave_timeout),
            ("socket-mode", now.socket_mode != new.socket_mode),
        ] {
            if differs {
                settings.push(name.to_owned());
            }
        }
        for fabric in self.guests.fabrics() {
            if new.fabrics.iter().any(|other| other.chid == fabric.chid && *other != fabric) {
                settings.push(format!("fabric {}", fabric.chid));
            }
        }
        settings
    }

    /// Makes fabrics and serves guests, up to the first failure. Records the guests' names in `done`.
    fn add(
        &self,
        fabrics: &[FabricSpec],
        guests: Vec<GuestSpec>,
        done: &mut Vec<String>,
    ) -> Result<(), DaemonError> {
        for fabric in fabrics {
            self.guests.add_fabric(fabric)?;
        }
        for spec in guests {
            let name = spec.name.clone();
            self.guests.add(spec, true)?;
            done.push(name);
        }
        Ok(())
    }

    fn apply(&self, new: &Config) -> Result<ReloadInfo, DaemonError> {
        let Plan { kept, added, replaced, removed } = Plan::new(&self.guests.specs(), new)?;
        let before: Vec<Chid> = self.guests.fabrics().iter().map(|fabric| fabric.chid).collect();
        let mut done = ReloadInfo::default();
        // First the steps able to fail without harm.
        if let Err(error) = self.add(&new.fabrics, added, &mut done.added) {
            for name in &done.added {
                let _ = self.guests.remove(name);
            }
            self.guests.forget_fabrics(|chid| before.contains(&chid));
            return Err(error);
        }
        for name in kept {
            self.guests.set_configured(&name);
        }
        let successors = replaced.iter().map(|spec| (spec.name.as_str(), LeaveReason::Restart));
        let ends = removed.iter().map(|name| (name.as_str(), LeaveReason::Removal));
        self.guests.leave_together(ends.chain(successors));
        // The names and sockets are free at once; the threads end on their own.
        let mut leaving = Vec::new();
        for name in removed {
            if let Ok(socket) = self.guests.remove(&name) {
                done.removed.push(name);
                leaving.push(socket);
            }
        }
        for spec in &replaced {
            if let Ok(socket) = self.guests.remove(&spec.name) {
                done.removed.push(spec.name.clone());
                leaving.push(socket);
            }
        }
        // A kept socket has the same queue for both guests: a connection taken by the old thread is lost to
        // the new one.
        let names = self.guests.names();
        if replaced.iter().filter_map(GuestSpec::path).any(|path| names.outlives_guest(path)) {
            let deadline = Instant::now() + STOP;
            for socket in &leaving {
                socket.wait_stopped(deadline);
            }
        }
        for spec in replaced {
            let name = spec.name.clone();
            match self.guests.add(spec, true) {
                Ok(()) if done.removed.contains(&name) => {
                    done.removed.retain(|removed| *removed != name);
                    done.changed.push(name);
                }
                Ok(()) => done.added.push(name),
                Err(error) => done.failed.push(error.to_string()),
            }
        }
        self.guests.forget_fabrics(|chid| new.fabrics.iter().any(|fabric| fabric.chid == chid));
        Ok(done)
    }
}

/// The action for each guest.
#[derive(Debug, Default, PartialEq, Eq)]
struct Plan {
    /// Unchanged.
    kept: Vec<String>,
    /// New guests, on sockets free of other guests now.
    added: Vec<GuestSpec>,
    /// Started after other guests are removed: guests with changed settings, or on a removed guest's socket.
    replaced: Vec<GuestSpec>,
    removed: Vec<String>,
}

impl Plan {
    /// `now`: guests, and whether each is from the configuration. Other guests stay.
    fn new(now: &[(GuestSpec, bool)], new: &Config) -> Result<Plan, DaemonError> {
        let mut plan = Plan::default();
        for spec in &new.guests {
            let there = now.iter().find(|(other, _)| other.name == spec.name);
            match there {
                Some((other, _)) if other == spec => plan.kept.push(spec.name.clone()),
                Some((_, true)) => plan.replaced.push(spec.clone()),
                Some((_, false)) => {
                    return Err(ConfigError::DuplicateName(spec.name.clone()).into());
                }
                None if now.iter().any(|(other, _)| other.socket == spec.socket) => {
                    plan.replaced.push(spec.clone());
                }
                None => plan.added.push(spec.clone()),
            }
        }
        for (spec, is_configured) in now {
            // The file does not control sockets of --fd.
            let goes = *is_configured && matches!(spec.socket, Socket::Path(_));
            if goes && !new.guests.iter().any(|other| other.name == spec.name) {
                plan.removed.push(spec.name.clone());
            }
        }
        // The socket of a guest added by the management socket stays in use.
        let occupied = plan.replaced.iter().find(|spec| {
            now.iter().any(|(other, configured)| !configured && other.socket == spec.socket)
        });
        match occupied.and_then(GuestSpec::path) {
            Some(path) => Err(ConfigError::DuplicateSocket(path.into()).into()),
            None => Ok(plan),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(now: &[(&str, bool)], new: &[&str]) -> Result<Plan, DaemonError> {
        let spec = |text: &str| GuestSpec::parse(text, crate::config::DEFAULT_CHID).unwrap();
        let now: Vec<_> = now.iter().map(|(text, file)| (spec(text), *file)).collect();
        let guests = new.iter().map(|text| spec(text)).collect();
        Plan::new(&now, &Config { guests, ..Config::default() })
    }

    fn names(specs: &[GuestSpec]) -> Vec<&str> {
        specs.iter().map(|spec| spec.name.as_str()).collect()
    }

    #[test]
    fn what_is_the_same_is_kept_and_the_rest_comes_and_goes() {
        let now = [("/s/a", true), ("/s/b", true), ("/s/c", true), ("/s/m", false)];
        let plan = plan(&now, &["/s/a", "/s/b,mode=666", "/s/d"]).unwrap();
        assert_eq!((plan.kept, plan.removed), (vec!["a".to_owned()], vec!["c".to_owned()]));
        assert_eq!((names(&plan.added), names(&plan.replaced)), (vec!["d"], vec!["b"]));
    }

    #[test]
    fn a_guest_with_another_name_takes_over_a_socket_after_the_other_has_gone() {
        let plan = plan(&[("/s/a", true)], &["/s/a,name=z"]).unwrap();
        assert_eq!(names(&plan.replaced), ["z"]);
        assert_eq!(plan.removed, ["a"]);
    }

    #[test]
    fn what_the_management_socket_added_stays_and_keeps_its_name_and_socket() {
        assert_eq!(plan(&[("/s/m", false)], &[]).unwrap(), Plan::default());
        assert_eq!(plan(&[("/s/m", false)], &["/s/m"]).unwrap().kept, ["m"]);
        for other in ["/s/x,name=m", "/s/m,name=x"] {
            assert!(plan(&[("/s/m", false)], &[other]).is_err(), "{other}");
        }
    }
}
