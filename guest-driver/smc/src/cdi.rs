//! `smc cdi`: the specification by which container engines give a container a device.

use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::{Value, json};

use crate::error::CliError;
use crate::output;
use crate::paths::{self, CONTAINER as PLACE};
use crate::run::{LIB, Rule, find_library};

/// Help of `smc cdi`.
pub(crate) const LONG_ABOUT: &str = "\
Prints a CDI specification (Container Device Interface), by which podman, Docker, containerd and CRI-O
put the programs of a container on SMC. Images need no change, and containers no privilege:

    vhost-device-ism --socket-path /run/ism/any/any.sock,devices=64,mode=666 &
    smc cdi --pool /run/ism/any/any.sock --output /etc/cdi/smc.json
    podman run --device virtio-ism/fabric=any nginx

A container gets the directory of the pool's socket, libsmc_preload.so, this program as
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
    /// devices. The file name without extension is the name of the device.
    #[arg(long, value_name = "SOCKET", required = true)]
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
/// The library is not found, a path has no name, or the file cannot be written.
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
    let devices = args.pool.iter().map(|pool| device(args, pool, &library, &program));
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
        .and_then(|()| std::fs::write(file, text))
        .map_err(CliError::io(format!("cannot write {}", file.display())))
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

    #[test]
    fn names_that_cdi_does_not_know_are_refused() {
        for pool in ["/run/ism/a b.sock", "/run/ism/a=b.sock", "/"] {
            assert!(matches!(made(pool), Err(CliError::Cdi(_))), "{pool}");
        }
    }
}
