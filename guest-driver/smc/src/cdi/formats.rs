// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The edits in the words of each engine.

use serde_json::{Value, json};

use super::edits::{Edits, Mount};
use crate::error::CliError;

/// The vendor and the class of the devices.
const KIND: &str = "virtio-ism/fabric";

/// A CDI specification.
///
/// # Errors
/// Never, unless JSON cannot be written.
pub(super) fn specification(devices: &[Edits]) -> Result<String, CliError> {
    let devices: Vec<_> = devices.iter().map(device).collect();
    let specification = json!({ "cdiVersion": "0.5.0", "kind": KIND, "devices": devices });
    let text = serde_json::to_string_pretty(&specification)
        .map_err(|error| CliError::Output(std::io::Error::other(error)))?;
    Ok(text + "\n")
}

fn device(edits: &Edits) -> Value {
    let mount = |mount: &Mount| match mount {
        Mount::Bind { host, container } => json!({
            "hostPath": host, "containerPath": container,
            "options": ["ro", "bind", "nosuid", "nodev"],
        }),
        Mount::Memory { container, size, mode } => json!({
            "hostPath": "tmpfs", "containerPath": container, "type": "tmpfs",
            "options": [
                "nosuid", "nodev", "noexec", format!("mode={mode:o}"), format!("size={size}"),
            ],
        }),
    };
    let variable = |(name, value): &(&str, String)| format!("{name}={value}");
    let mut edited = json!({
        "mounts": edits.mounts.iter().map(mount).collect::<Vec<_>>(),
        "env": edits.environment.iter().map(variable).collect::<Vec<_>>(),
    });
    if let Some(program) = &edits.hook {
        edited["hooks"] = json!([{
            "hookName": "createRuntime", "path": program, "args": ["smc", "grant", "--hook"],
        }]);
    }
    json!({ "name": edits.name, "containerEdits": edited })
}

/// The only device: a container has one in these formats.
fn only<'a>(devices: &'a [Edits], format: &str) -> Result<&'a Edits, CliError> {
    match devices {
        [device] => Ok(device),
        _ => Err(CliError::Cdi(format!(
            "--format {format} takes one --pool, since a container does"
        ))),
    }
}

/// Options of `docker run`, one a line.
///
/// # Errors
/// There are several pools, or a path or a rule has a character with a meaning for a shell or for
/// the option.
pub(super) fn options(devices: &[Edits]) -> Result<String, CliError> {
    // With -v Docker makes missing directories; with --mount a missing directory is an error.
    lines(only(devices, "options")?, |mount| match mount {
        Mount::Bind { host, container } => {
            format!("type=bind,source={host},target={container},readonly")
        }
        Mount::Memory { container, size, mode } => {
            format!("type=tmpfs,target={container},tmpfs-size={size},tmpfs-mode={mode:o}")
        }
    })
}

/// Options of `ctr run`, one a line.
///
/// # Errors
/// As [`options`].
pub(super) fn ctr(devices: &[Edits]) -> Result<String, CliError> {
    lines(only(devices, "ctr")?, |mount| match mount {
        Mount::Bind { host, container } => {
            format!("type=bind,src={host},dst={container},options=rbind:ro:nosuid:nodev")
        }
        Mount::Memory { container, size, mode } => format!(
            "type=tmpfs,src=tmpfs,dst={container},options=nosuid:nodev:noexec:mode={mode:o}:size={size}"
        ),
    })
}

/// The options of mounts and of the environment. `mount`: the value of a `--mount`.
fn lines(edits: &Edits, mount: impl Fn(&Mount) -> String) -> Result<String, CliError> {
    let mut text = String::new();
    for one in &edits.mounts {
        if let Mount::Bind { host, .. } = one {
            plain(host)?;
        }
        text += &format!("--mount {}\n", mount(one));
    }
    for (name, value) in &edits.environment {
        // Rules have commas and addresses.
        plain(&value.replace([',', ':'], ""))?;
        text += &format!("--env {name}={value}\n");
    }
    Ok(text)
}

/// Checks a path for characters with a meaning for a shell or in a list of commas.
fn plain(path: &str) -> Result<(), CliError> {
    match path.chars().find(|c| !c.is_ascii_alphanumeric() && !"/._+-@%=".contains(*c)) {
        None => Ok(()),
        Some(c) => Err(CliError::Cdi(format!("this format cannot write {c:?} of {path:?}"))),
    }
}

/// The beginning of a compose file: an extension for services to merge.
///
/// # Errors
/// Never, unless JSON cannot be written.
pub(super) fn compose(devices: &[Edits]) -> Result<String, CliError> {
    let mut text = String::new();
    for Edits { name, mounts, environment, .. } in devices {
        // JSON is YAML.
        let mount = |mount: &Mount| match mount {
            Mount::Bind { host, container } => json!({
                "type": "bind", "source": host, "target": container, "read_only": true,
            }),
            // The mode is 1777: version 3 of the format has no field for the mode.
            Mount::Memory { container, size, .. } => {
                json!({ "type": "tmpfs", "target": container, "tmpfs": { "size": size } })
            }
        };
        text += &format!("x-smc-{name}: &smc-{name}\n  volumes:\n");
        for value in mounts.iter().map(mount) {
            text += &format!("    - {value}\n");
        }
        text += "  environment:\n";
        for (name, value) in environment {
            text += &format!("    {name}: {}\n", json!(value));
        }
    }
    Ok(text.replace('$', "$$"))
}

#[cfg(test)]
mod tests {
    use super::super::edits::tests::{args, made_of};
    use super::*;

    fn edits(pool: &str) -> Edits {
        made_of(&args(pool)).unwrap()
    }

    #[test]
    fn a_specification_mounts_nothing_writable_of_the_host() {
        let device = device(&edits("/run/ism/web/web.sock"));
        let edits = &device["containerEdits"];
        assert_eq!(edits["hooks"][0]["args"], json!(["smc", "grant", "--hook"]));
        let mounts = edits["mounts"].as_array().unwrap();
        assert_eq!(mounts.len(), 8);
        // Mounts below /run/smc follow it.
        assert_eq!(mounts[0]["containerPath"], "/run/smc");
        for mount in mounts.iter().filter(|mount| mount["type"] != "tmpfs") {
            assert!(mount["options"].as_array().unwrap().contains(&json!("ro")), "{mount}");
        }
        let env = edits["env"].as_array().unwrap();
        assert!(env.contains(&json!("SMC_RUN_DEVICES=/run/smc/pool/web.sock")));
    }

    #[test]
    fn options_are_words_of_a_shell() {
        let text = options(&[edits("/run/ism/web/web.sock")]).unwrap();
        assert!(text.contains("source=/run/ism/web,target=/run/smc/pool,readonly\n"), "{text}");
        assert!(text.contains("--env SMC_RUN_CONNECT=10.0.0.0/8:80,any:90\n"), "{text}");
        assert!(!text.contains(['$', '*', '"', '\'', '\\']), "{text}");
        for pool in ["/run/a b/c.sock", "/run/a,b/c.sock", "/run/a$b/c.sock", "/run/a\nb/c.sock"] {
            assert!(options(&[edits(pool)]).is_err(), "{pool}");
        }
        assert!(options(&[edits("/run/a.sock"), edits("/run/b.sock")]).is_err());
        let text = ctr(&[edits("/run/ism/web/web.sock")]).unwrap();
        assert!(text.contains("src=/run/ism/web,dst=/run/smc/pool,options=rbind:ro:"), "{text}");
    }

    #[test]
    fn the_beginning_of_a_compose_file_has_an_extension_for_each_pool() {
        let text = compose(&[edits("/run/a$/a.sock"), edits("/run/b/b.sock")]).unwrap();
        assert!(text.starts_with("x-smc-a: &smc-a\n  volumes:\n    - {"), "{text}");
        assert!(text.contains("\nx-smc-b: &smc-b\n"), "{text}");
        assert!(text.contains("\"source\":\"/run/a$$\""), "{text}");
        assert!(text.contains("\n    SMC_RUN_ACCEPT: \"any\"\n"), "{text}");
    }
}
