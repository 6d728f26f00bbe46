// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `smc cdi`: the specification by which container engines give a container a device.

use std::io::Write;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::{Value, json};

use smc_settings::{Place, PlaceReport};

use crate::error::CliError;
use crate::output;
use crate::paths::{self, CONTAINER as PLACE};
use crate::run::{LIB, Rule, find_library};

/// Help of `smc cdi`.
pub(crate) const LONG_ABOUT: &str = "\
Prints a CDI specification (Container Device Interface), by which podman, Docker, containerd and CRI-O
put the programs of a container on SMC. Images need no change, and containers no privilege:

    smc cdi --output /etc/cdi/smc.json
    podman run --device virtio-ism/fabric=any nginx

That is the device pool of the packaged service; --pool names another one. A container gets the directory of the pool's socket, libsmc_preload.so, this program as
/usr/local/bin/smc, and the environment that makes the dynamic linker load the library. \"smc stat
connections\" in the container shows what its connections are.

Containers find out by TCP option 254 which peers speak SMC: the specification has a hook by which the
runtime has \"smc grant\" run for each container, on the host. With --no-hook there is none. Containers
then propose SMC to the servers that --peer names. All of them must have the device, since another
server would take the first message for data. Programs for another libc than glibc stay on TCP.";

/// End of the help of `smc cdi`.
pub(crate) const AFTER: &str = "\
Examples:
  smc cdi --pool /run/ism/web/web.sock --peer 10.89.0.0/24 --output /etc/cdi/smc-web.json
  podman run --device virtio-ism/fabric=web client";

/// The vendor and the class of the devices.
const KIND: &str = "virtio-ism/fabric";

/// Options of `smc cdi`.
#[derive(Args, Debug)]
pub(crate) struct CdiArgs {
    /// Socket of a device pool, alone in its directory, which containers see; repeat it for more
    /// devices. The file name without extension is the name of the device [default: the pool of the
    /// packaged service].
    #[arg(long, value_name = "SOCKET")]
    pool: Vec<PathBuf>,

    /// Servers to which the containers' programs propose SMC without asking: ADDRESS[/BITS][:PORT[-PORT]], where * is
    /// any address; repeat it for more. Without it, SMC_RUN_CONNECT of the container says it.
    #[arg(long, value_name = "RULE", value_delimiter = ',')]
    peer: Vec<Rule>,

    /// Clients that may use SMC, and ports, in the same form.
    #[arg(long, value_name = "RULE", value_delimiter = ',', default_value = "*")]
    accept: Vec<Rule>,

    /// No hook, so no TCP option 254: for runtimes that have no rights of root.
    #[arg(long)]
    no_hook: bool,

    /// The library [default: where "smc run" finds it].
    #[arg(long, value_name = "FILE")]
    library: Option<PathBuf>,

    /// Write the specification into this file, which others may read; its directory is made.
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// Prints or writes the specification.
///
/// # Errors
/// The library is not found, a path has no name, the directory of a pool has something else, or the
/// file cannot be written.
pub(crate) fn run(args: &CdiArgs) -> Result<(), CliError> {
    let failed = |why: String| CliError::Cdi(why);
    let CdiArgs { library, .. } = args;
    let library = match library {
        Some(file) => file.clone(),
        None => find_library().map_err(failed)?,
    };
    let whole = |path: &Path| {
        std::fs::canonicalize(path)
            .map_err(|error| CliError::Cdi(format!("{}: {error}", path.display())))
    };
    let program = std::env::current_exe().map_err(CliError::io("cannot find this program"))?;
    let (library, program) = (whole(&library)?, whole(&program)?);
    if let Some(path) = open_to_others(&program).filter(|_| !args.no_hook) {
        eprintln!(
            "smc cdi: the hook runs {program:?} as root, and others than root can change {path:?}"
        );
    }
    let pools = match args.pool.is_empty() {
        true => vec![service_pool()?],
        false => args.pool.clone(),
    };
    for pool in &pools {
        is_alone(pool)?;
    }
    let devices = pools.iter().map(|pool| device(args, pool, &library, &program));
    let devices = devices.collect::<Result<Vec<_>, _>>()?;
    let specification = json!({ "cdiVersion": "0.5.0", "kind": KIND, "devices": devices });
    let text = serde_json::to_string_pretty(&specification)
        .map_err(|error| CliError::Output(std::io::Error::other(error)))?
        + "\n";
    let Some(file) = &args.output else { return output::print(&text) };
    let written = match file.parent() {
        Some(directory) => std::fs::create_dir_all(directory),
        None => Ok(()),
    };
    written
        .and_then(|()| {
            // A FIFO that nobody reads is an error, and no wait.
            let mut options = std::fs::File::options();
            options.write(true).create(true).truncate(true).custom_flags(libc::O_NONBLOCK);
            let mut opened = options.open(file)?;
            opened.write_all(text.as_bytes()).inspect_err(|_| {
                // Runtimes refuse to start anything while a file there is half written.
                if opened.metadata().is_ok_and(|data| data.is_file()) {
                    let _ = std::fs::remove_file(file);
                }
            })
        })
        .map_err(CliError::io(format!("cannot write {}", file.display())))
}

/// The pool of the packaged service.
fn service_pool() -> Result<PathBuf, CliError> {
    let PlaceReport { directory, sockets, .. } = PlaceReport::at(Place::Service);
    let pool = directory.join(paths::POOL);
    match sockets {
        Ok(_) => Ok(pool),
        Err(error) => Err(CliError::Cdi(format!(
            "the service's pool {}: {error}; --pool names another one",
            pool.display()
        ))),
    }
}

/// Refuses a pool whose directory has something else: containers would have that, too, a management
/// socket for example. A pool that is not there yet is in nobody's way.
fn is_alone(pool: &Path) -> Result<(), CliError> {
    let directory = match pool.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    // A container runtime would make it, for root only, and the daemon could not put a socket there.
    let entries = std::fs::read_dir(directory).map_err(|error| {
        CliError::Cdi(format!("--pool {}: its directory: {error}", pool.display()))
    })?;
    let names = entries.flatten().map(|entry| entry.file_name());
    match names.into_iter().find(|name| Some(name.as_os_str()) != pool.file_name()) {
        None => Ok(()),
        Some(other) => Err(CliError::Cdi(format!(
            "--pool {}: containers would also have {other:?} of its directory: give the pool a \
             directory of its own",
            pool.display()
        ))),
    }
}

/// The file or a directory of its path, if others than root can change it.
fn open_to_others(program: &Path) -> Option<&Path> {
    program.ancestors().find(|path| {
        std::fs::metadata(path).is_ok_and(|data| {
            let mode = data.mode();
            // In a sticky directory nobody can replace a file of another user.
            let is_sticky = data.is_dir() && mode & 0o1000 != 0;
            data.uid() != 0 || mode & 0o022 != 0 && !is_sticky
        })
    })
}

fn device(args: &CdiArgs, pool: &Path, library: &Path, program: &Path) -> Result<Value, CliError> {
    let wrong = |what: &str| CliError::Cdi(format!("--pool {}: {what}", pool.display()));
    let pool = std::path::absolute(pool).map_err(|error| wrong(&error.to_string()))?;
    let text = |path: &Path| path.to_str().map(str::to_owned).ok_or_else(|| wrong("is not UTF-8"));
    let (Some(stem), Some(file), Some(directory)) =
        (pool.file_stem(), pool.file_name(), pool.parent())
    else {
        return Err(wrong("has no file name"));
    };
    let name = text(stem.as_ref())?;
    if !name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c)) {
        return Err(wrong("a CDI device has letters, digits, -, _ and . in its name"));
    }
    // A mount of the directory, not of the socket: the next daemon makes another socket.
    let read_only = ["ro", "bind", "nosuid", "nodev"];
    let bind = |host: String, container: String| json!({ "hostPath": host, "containerPath": container, "options": read_only });
    let mut mounts = vec![
        bind(text(directory)?, format!("{PLACE}/pool")),
        bind(text(program)?, "/usr/local/bin/smc".into()),
        json!({
            "hostPath": "tmpfs", "containerPath": paths::CONTAINER_STATISTICS, "type": "tmpfs",
            "options": ["nosuid", "nodev", "noexec", "mode=1777", "size=1m"],
        }),
    ];
    for lib in LIB {
        let there = format!("{PLACE}/preload/{lib}/libsmc_preload.so");
        mounts.push(bind(text(library)?, there));
    }
    let rules = |rules: &[Rule]| rules.iter().map(Rule::as_str).collect::<Vec<_>>().join(",");
    let mut env = vec![
        // musl does not know $LIB: its linker finds no such file and goes on without a word, where it
        // would end the program for a library that needs another libc.
        format!("LD_PRELOAD={PLACE}/preload/$LIB/libsmc_preload.so"),
        format!("SMC_DEVICE={PLACE}/pool/{}", text(file.as_ref())?),
        format!("SMC_RUN_DEVICES={PLACE}/pool/{}", text(file.as_ref())?),
        format!("SMC_RUN_ACCEPT={}", rules(&args.accept)),
        format!("SMC_RUN_RENDEZVOUS={}", if args.no_hook { "off" } else { "auto" }),
        format!("SMC_RUN_STATISTICS={}", paths::CONTAINER_STATISTICS),
    ];
    if !args.peer.is_empty() {
        env.push(format!("SMC_RUN_CONNECT={}", rules(&args.peer)));
    }
    let mut edits = json!({ "mounts": mounts });
    if !args.no_hook {
        env.push("SMC_RUN_OPTION=granted".into());
        let args = ["smc", "grant", "--hook"];
        let path = text(program)?;
        edits["hooks"] = json!([{ "hookName": "createRuntime", "path": path, "args": args }]);
    }
    edits["env"] = json!(env);
    Ok(json!({ "name": name, "containerEdits": edits }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(pool: &str) -> CdiArgs {
        CdiArgs {
            pool: vec![pool.into()],
            peer: vec!["10.0.0.0/8:80".parse().unwrap()],
            accept: vec!["*".parse().unwrap()],
            no_hook: false,
            library: None,
            output: None,
        }
    }

    fn made(pool: &str) -> Result<Value, CliError> {
        made_of(&args(pool))
    }

    fn made_of(args: &CdiArgs) -> Result<Value, CliError> {
        device(args, &args.pool[0], Path::new("/l/libsmc_preload.so"), Path::new("/b/smc"))
    }

    #[test]
    fn the_runtime_grants_the_option_unless_it_is_told_not_to() {
        let edits = made("/run/ism/web/web.sock").unwrap()["containerEdits"].take();
        assert_eq!(edits["hooks"][0]["path"], "/b/smc");
        assert_eq!(edits["hooks"][0]["args"], json!(["smc", "grant", "--hook"]));
        let has = |edits: &Value, variable: &str| {
            edits["env"].as_array().unwrap().contains(&json!(variable))
        };
        assert!(has(&edits, "SMC_RUN_RENDEZVOUS=auto") && has(&edits, "SMC_RUN_OPTION=granted"));
        let without = CdiArgs { no_hook: true, ..args("/run/ism/web/web.sock") };
        let edits = made_of(&without).unwrap()["containerEdits"].take();
        assert!(edits.get("hooks").is_none() && has(&edits, "SMC_RUN_RENDEZVOUS=off"));
        assert!(!has(&edits, "SMC_RUN_OPTION=granted"));
    }

    #[test]
    fn a_device_is_named_after_its_pool_and_mounts_nothing_writable_of_the_host() {
        let device = made("/run/ism/web/web.sock").unwrap();
        assert_eq!(device["name"], "web");
        let edits = &device["containerEdits"];
        let mounts = edits["mounts"].as_array().unwrap();
        assert_eq!(mounts[0]["hostPath"], "/run/ism/web");
        for mount in mounts.iter().filter(|mount| mount["type"] != "tmpfs") {
            assert!(mount["options"].as_array().unwrap().contains(&json!("ro")), "{mount}");
        }
        let env = edits["env"].as_array().unwrap();
        assert!(env.contains(&json!("SMC_RUN_DEVICES=/run/smc/pool/web.sock")));
        assert!(env.contains(&json!("SMC_RUN_CONNECT=10.0.0.0/8:80")));
    }

    struct Place(PathBuf);

    impl Place {
        fn new(name: &str) -> Place {
            let path = std::env::temp_dir().join(format!("smc-cdi-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&path).unwrap();
            Place(path)
        }

        fn path(&self) -> &Path {
            &self.0
        }
    }

    impl Drop for Place {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_pool_with_something_beside_it_is_refused() {
        let place = Place::new("alone");
        let pool = place.path().join("any.sock");
        assert!(is_alone(&pool).is_ok(), "not there yet");
        let missing = is_alone(&place.path().join("nodir/any.sock")).unwrap_err().to_string();
        assert!(missing.contains("nodir/any.sock: its directory: No such file"), "{missing}");
        std::fs::write(&pool, "").unwrap();
        assert!(is_alone(&pool).is_ok());
        std::fs::write(place.path().join("management\u{1b}.sock"), "").unwrap();
        let refused = is_alone(&pool).unwrap_err().to_string();
        assert!(refused.contains("\"management\\u{1b}.sock\""), "{refused}");
    }

    #[test]
    fn a_program_that_others_can_change_is_found() {
        use std::os::unix::fs::PermissionsExt;
        let place = Place::new("open");
        let program = place.path().join("smc");
        std::fs::write(&program, "").unwrap();
        let with_mode = |path: &Path, mode| {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        with_mode(&program, 0o775);
        assert_eq!(open_to_others(&program), Some(&*program));
        with_mode(&program, 0o755);
        let is_root = std::fs::metadata(&program).unwrap().uid() == 0;
        if is_root {
            assert_eq!(open_to_others(&program), None);
            with_mode(place.path(), 0o777);
            assert_eq!(open_to_others(&program), Some(place.path()));
        }
    }

    #[test]
    fn names_that_cdi_does_not_know_are_refused() {
        for pool in ["/run/ism/a b.sock", "/run/ism/a=b.sock", "/"] {
            assert!(matches!(made(pool), Err(CliError::Cdi(_))), "{pool}");
        }
    }
}
