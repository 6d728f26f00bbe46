// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `smc run`: runs a program with its TCP sockets on SMC.

mod device;
pub(crate) mod inspect;
mod io_uring;
mod kernel;
mod library;
mod load_check;
mod option;
mod rule;

use std::ffi::OsString;
use std::os::fd::IntoRawFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use clap::{ArgAction, Args};
use guest_driver::program_file::Obstacle;
use guest_driver::traffic;
use ism_sys::Loader;

use crate::error::CliError;
use crate::stack::RendezvousArg;

pub(crate) use kernel::keep;
pub(crate) use library::LIB;
use load_check::WatchedProgram;
pub(crate) use rule::Rule;

/// Help of `smc run`.
pub(crate) const LONG_ABOUT: &str = "\
Runs a program with SMC instead of TCP on each connection whose other end speaks SMC too. The program
is not changed: \"smc run\" loads a library into it, which replaces the functions of libc that work on
sockets. All other connections stay TCP.

Both ends announce SMC by TCP option 254 (RFC 7609). \"smc run\" needs cgroup v2, CAP_BPF and
CAP_NET_ADMIN for that; the program itself needs no capability. A peer that does not announce SMC gets
no byte of it. Without the option a server recognises an SMC client by its first bytes. A client then
uses SMC only with the servers that --peer names, since others would take the first message for data.
`smc doctor` shows what is missing.

Each process that has SMC connections needs a virtio-ism device of its own: the free ones of a
directory of sockets, or of a virtual machine, are used in turn (`smc stat fabric` lists them). A process
that finds none prints a message and stays on TCP; it tries again about every second.

A short connection takes longer on SMC than on TCP. So a client leaves connections to a server on TCP
after eight of them were too short for SMC to pay, until one of 64 turns out to be longer.
Later runs of the program remember this for ten minutes. `smc stat endpoints` shows what was learned; --always and --strict turn it off.

With \"--stack kernel\" the library only makes TCP sockets sockets of the kernel's AF_SMC, and the kernel
does the rest, over its own ISM device. Processes then share that device, and io_uring, fork and passed
descriptors work as they do with TCP. The kernel finds peers by TCP option 254. It needs an enterprise id
(\"smcd ueid add VIRTIO-ISM\"); rules about peers are not for it. \"smc doctor\" shows what it has.
Static programs and programs in Go, which the library does not reach, get a cgroup in which the kernel
itself makes these sockets; with --system-calls all programs do, and so their children. This takes root,
Linux 6.11, and BTF and MPTCP in the kernel.

If a network removes the option from SYN-ACKs only, a server whose protocol lets the server send first
waits six seconds on each connection. A policy rule that leaves its ports on TCP avoids that.";

/// Help of `smc run`, examples.
pub(crate) const AFTER: &str = "\
Examples:
  smc run redis-server
  smc run --peer '*:6379' redis-benchmark -t get,set
  smc run --rendezvous required --policy /etc/smc/policy.toml nginx
  smc run --status /tmp/status --peer 10.0.0.0/8 curl http://10.0.0.2/
  smc run --always '*:80' ab -n 1000 http://10.0.0.2/

Left on TCP, with a notice (an error with --strict): programs in Go and static ones without
--system-calls (\"smc doctor PROGRAM\" tells of each), programs for another libc, and those with more
rights than their user (setuid).
io_uring is not offered to the program, which then uses epoll.

Exit status: that of the program; 125 if \"smc run\" itself fails, 126 if the program is found and
cannot be executed, 127 if it is not found.";

/// Options of `smc run`.
#[derive(Args, Debug)]
pub(crate) struct RunArgs {
    /// Whose SMC sockets the program gets.
    #[arg(long, value_enum, value_name = "STACK", env = "SMC_STACK",
          default_value_t = kernel::StackArg::User)]
    stack: kernel::StackArg,

    /// A virtio-ism device, a directory of their sockets, or "pci" for the free ones of this virtual
    /// machine; repeat the option for more [default: the first fabric of this user, see "smc
    /// config", or else "pci"].
    #[arg(long, value_name = "DEVICE", env = "SMC_DEVICE", value_delimiter = ':')]
    device: Vec<PathBuf>,

    /// User EID (enterprise id); repeat the option for more. Both ends need one in common
    /// [default: VIRTIO-ISM].
    #[arg(long = "eid", value_name = "EID", env = "SMC_EID", value_delimiter = ',')]
    eids: Vec<String>,

    /// How to find out whether a peer speaks SMC.
    #[arg(long, value_enum, value_name = "HOW", env = "SMC_RENDEZVOUS",
          default_value_t = RendezvousArg::Auto)]
    rendezvous: RendezvousArg,

    /// File of rules: peers, ports and programs whose connections may be SMC.
    #[arg(long, value_name = "FILE", env = "SMC_POLICY")]
    policy: Option<PathBuf>,

    /// Servers with SMC, even without an answer to the TCP option: ADDRESS[/BITS][:PORT[-PORT]],
    /// where * is any address; repeat the option for more. With "--rendezvous required", the only
    /// servers to be asked [default: all].
    #[arg(long, value_name = "RULE", value_delimiter = ',')]
    peer: Vec<Rule>,

    /// Clients allowed to use SMC, and ports of the program, in the same form [default: all].
    #[arg(long, value_name = "RULE", value_delimiter = ',')]
    accept: Vec<Rule>,

    /// Servers to which all connections are SMC, also where short ones would be faster on TCP, in the
    /// same form [default: none; with --strict all].
    #[arg(long, value_name = "RULE", value_delimiter = ',')]
    always: Vec<Rule>,

    /// Ports of the program whose clients may use SMC; short for --accept '*:PORT'.
    #[arg(long, value_name = "PORT[-PORT]", value_delimiter = ',', value_parser = Rule::of_ports)]
    port: Vec<Rule>,

    /// Receive buffer (DMB) of a connection, bytes: 16K to 1M, a power of two.
    #[arg(long, value_name = "SIZE", default_value = "256K", value_parser = smc_settings::parse_buffer)]
    buffer: usize,

    /// How long a waiting call polls the shared memory before sleeping, microseconds; 0: not at all.
    #[arg(long, value_name = "US", default_value_t = 50)]
    spin_us: u64,

    /// Have connections go on over TCP when their device or last link is gone, if the peer does the
    /// same. This holds between processes and virtual machines of one host, and for SMC-R of release
    /// 2.1; "--outlive-device=false" switches it off.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true,
          default_value = "true", default_missing_value = "true", action = ArgAction::Set)]
    outlive_device: bool,

    /// Have connections stay on TCP when the device they left is there again. SMC-R does so in any
    /// case.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true,
          default_value = "false", default_missing_value = "true", action = ArgAction::Set)]
    stay_on_tcp: bool,

    /// Put programs on SMC, too, that make system calls themselves: programs in Go, and static ones. An
    /// experiment: a connection for each request is slower there than on TCP. With "--stack kernel": no
    /// library, but sockets of AF_SMC for a cgroup of the program and its children.
    #[arg(long = "system-calls", visible_alias = "go", value_name = "BOOL", num_args = 0..=1,
          require_equals = true, env = "SMC_GO",
          default_value = "false", default_missing_value = "true", action = ArgAction::Set)]
    go: bool,

    /// Write a file per process into this directory, with a line for each connection: SMC or TCP, and
    /// why.
    #[arg(long, value_name = "DIRECTORY")]
    status: Option<PathBuf>,

    /// Put all connections on SMC, short ones too, and fail if the program cannot be put on SMC,
    /// instead of running on TCP: if the library is not found or cannot be loaded, if a named device
    /// does not exist, or if no daemon answers. A device in use by another process will do, since the
    /// program takes a device with its first connection only.
    #[arg(long)]
    strict: bool,

    /// The program and its arguments.
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_hint = clap::ValueHint::CommandWithArguments,
        value_name = "PROGRAM"
    )]
    command: Vec<OsString>,
}

impl RunArgs {
    /// The arguments of a command line without options.
    pub(crate) fn by_default(command: Vec<OsString>) -> RunArgs {
        RunArgs {
            stack: kernel::StackArg::User,
            device: Vec::new(),
            eids: Vec::new(),
            rendezvous: RendezvousArg::Auto,
            policy: None,
            peer: Vec::new(),
            accept: Vec::new(),
            always: Vec::new(),
            port: Vec::new(),
            buffer: 256 << 10,
            spin_us: 50,
            outlive_device: true,
            stay_on_tcp: false,
            go: false,
            status: None,
            strict: false,
            command,
        }
    }
}

/// The library for programs. The error names the searched places.
pub(crate) fn find_library() -> Result<PathBuf, String> {
    library::find().map_err(|missing| missing.to_string())
}

/// Replaces this process by the program.
///
/// # Errors
/// There is no such program, or the program cannot be started; with `--strict`, it would stay on TCP.
pub(crate) fn run(args: &RunArgs) -> Result<ExitCode, CliError> {
    let Some((name, rest)) = args.command.split_first() else {
        return Ok(ExitCode::FAILURE);
    };
    let program = inspect::find(name)
        .map_err(|why| CliError::NoProgram { program: name.to_string_lossy().into(), why })?;
    let mut command = Command::new(&program);
    command.arg0(name).args(rest);
    let by_kernel = kernel::is_chosen(args)
        .map_err(|why| CliError::Run { program: name.to_string_lossy().into(), why })?;
    if by_kernel {
        return run_on_kernel(command, args, name, &program);
    }
    if kernel::is_in_cgroup() {
        crate::output::note(
            "smc run: the kernel makes sockets of AF_SMC for this cgroup (smc grant --kernel), and the \
             options of smc run have no effect",
        );
        kernel::withhold_devices(&mut command);
        return Err(failed_exec(&mut command, name));
    }
    let door = inspect::door(&program);
    let has_linker = !matches!(door, Some(Ok(door)) if door.needs_loader());
    let prepared = match inspect::obstacle(door, args.go) {
        Some(obstacle) => Err(obstacle.to_string()),
        None => library::find().map_err(|missing| missing.to_string()),
    };
    let devices = match args.device.is_empty() {
        true => vec![device::default()?],
        false => args.device.clone(),
    };
    let prepared = match args.strict {
        true => prepared.and_then(|library| device::check(&devices).map(|()| library)),
        false => prepared,
    };
    start(command, args, name, prepared, !has_linker, |command, library| {
        let proof = prepare(command, &library, args, devices, name)?;
        io_uring::withhold();
        // The filters end the process for no tested call, so the library need not test again.
        match ism_sys::harmless_filters() {
            0 => command.env_remove("SMC_RUN_FILTERS"),
            filters => command.env("SMC_RUN_FILTERS", filters.to_string()),
        };
        Ok(proof)
    })
}

/// Replaces this process by the program, with sockets of the kernel's AF_SMC.
fn run_on_kernel(
    mut command: Command,
    args: &RunArgs,
    name: &OsString,
    program: &Path,
) -> Result<ExitCode, CliError> {
    let obstacle = inspect::obstacle_for_libc(program);
    let privileged = obstacle == Some(Obstacle::Privileged);
    let mut prepared = match obstacle {
        Some(obstacle) => Err(obstacle.to_string()),
        None => library::find().map_err(|missing| missing.to_string()),
    };
    if let Some(lacks) = crate::kernel::obstacle().filter(|_| args.strict) {
        prepared = Err(lacks);
    } else if !privileged && (args.go || prepared.is_err()) {
        let entered = if kernel::is_in_cgroup() { Ok(()) } else { kernel::enter_cgroup() };
        match (entered, &prepared) {
            (Ok(()), _) => {
                kernel::withhold_devices(&mut command);
                return Err(failed_exec(&mut command, name));
            }
            (Err(why), Err(obstacle)) => {
                prepared = Err(format!("{obstacle}; and without a library: {why}"));
            }
            (Err(why), Ok(_)) => crate::output::note(&format!(
                "smc run: only programs with libc get sockets of AF_SMC, since {why}"
            )),
        }
    }
    start(command, args, name, prepared, false, |command, library| {
        kernel::prepare(command, library::preload(&library));
        load_check::request(command, &name.to_string_lossy(), args.strict, None)
    })
}

/// Replaces this process by the program. `prepare` makes the program ready unless something is
/// missing. `loads`: the program has no dynamic linker, and gets one.
fn start(
    mut command: Command,
    args: &RunArgs,
    name: &OsString,
    prepared: Result<PathBuf, String>,
    loads: bool,
    prepare: impl FnOnce(&mut Command, PathBuf) -> Result<WatchedProgram, CliError>,
) -> Result<ExitCode, CliError> {
    let mut proof = match prepared {
        Ok(library) => Some(prepare(&mut command, library)?),
        Err(why) => {
            stays_on_tcp(args, name, why)?;
            None
        }
    };
    let mut loader = None;
    if loads && let Some(watched) = proof.take() {
        match Loader::start() {
            Ok(started) => (loader, proof) = (Some(started), Some(watched)),
            Err(why) => {
                watched.withdraw();
                command.env_remove("SMC_RUN_PROOF");
                stays_on_tcp(args, name, why.to_string())?;
            }
        }
    }
    let error = failed_exec(&mut command, name);
    if let Some(loader) = loader {
        loader.withdraw();
    }
    if let Some(proof) = proof {
        proof.withdraw();
    }
    Err(error)
}

/// Replaces this process by the program. The result is the error.
fn failed_exec(command: &mut Command, name: &OsString) -> CliError {
    let source = command.exec();
    CliError::Exec { program: name.to_string_lossy().into(), source }
}

/// Says why the program stays on TCP.
///
/// # Errors
/// With `--strict`.
fn stays_on_tcp(args: &RunArgs, name: &OsString, why: String) -> Result<(), CliError> {
    if args.strict {
        return Err(CliError::Run { program: name.to_string_lossy().into(), why });
    }
    let name = crate::output::printable(&name.to_string_lossy());
    crate::output::note(&format!("smc run: {name} stays on TCP: {why}"));
    Ok(())
}

fn list<'a>(rules: impl IntoIterator<Item = &'a Rule>) -> String {
    rules.into_iter().map(Rule::as_str).collect::<Vec<_>>().join(",")
}

fn prepare(
    command: &mut Command,
    library: &std::path::Path,
    args: &RunArgs,
    devices: Vec<PathBuf>,
    name: &OsString,
) -> Result<WatchedProgram, CliError> {
    let preload = library::preload(library);
    for eid in &args.eids {
        smc_core::wire::ids::Eid::new(eid)
            .map_err(|why| CliError::Eid { name: eid.clone(), why: why.to_string() })?;
    }
    let devices = std::env::join_paths(devices).map_err(|error| CliError::Run {
        program: name.to_string_lossy().into(),
        why: error.to_string(),
    })?;
    let accept = match args.accept.is_empty() && args.port.is_empty() {
        true => "*".into(),
        false => list(args.accept.iter().chain(&args.port)),
    };
    command
        .env("LD_PRELOAD", preload)
        .env("SMC_RUN_DEVICES", devices)
        .env("SMC_RUN_EIDS", args.eids.join(","))
        .env("SMC_RUN_CONNECT", list(&args.peer))
        .env("SMC_RUN_ACCEPT", accept)
        .env("SMC_RUN_ALWAYS", if args.strict { "*".into() } else { list(&args.always) })
        .env("SMC_RUN_BUFFER", args.buffer.to_string())
        .env("SMC_RUN_SPIN_US", args.spin_us.to_string())
        .env("SMC_RUN_OUTLIVE", args.outlive_device.to_string())
        .env("SMC_RUN_STAY_ON_TCP", args.stay_on_tcp.to_string())
        .env("SMC_RUN_GO", args.go.to_string());
    command.env_remove("SMC_RUN_TRAFFIC").env_remove("SMC_RUN_LEARNED");
    let learned = smc_settings::traffic_file();
    if let Ok(traffic) = traffic::create(learned.as_deref()) {
        // The descriptor is the program's from now on.
        command.env("SMC_RUN_TRAFFIC", traffic.into_raw_fd().to_string());
        command.envs(learned.map(|learned| ("SMC_RUN_LEARNED", learned)));
    }
    if let Some(directory) = smc_settings::make_statistics_directory() {
        command.env("SMC_RUN_STATISTICS", directory);
    }
    if let Some(status) = &args.status {
        std::fs::create_dir_all(status)
            .map_err(CliError::io(format!("cannot make {}", status.display())))?;
        let status = std::path::absolute(status).unwrap_or_else(|_| status.clone());
        command.env("SMC_RUN_STATUS", status);
    }
    let task = option::pass_on(command, args, name)?;
    load_check::request(command, &name.to_string_lossy(), args.strict, task)
}
